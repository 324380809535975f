"""Engines run nodes in one or more processes and deliver their messages."""
