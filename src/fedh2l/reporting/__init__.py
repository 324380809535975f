"""Showing results to people: progress, tables, and later reports."""
