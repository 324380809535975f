"""Results for people: tables, progress bars and sheets of samples.

Statistics over many runs are in `bench`.
"""
