"""Trainer modules that ship with Trainyard, and the raw data of those that bring their own.

A user's own trainer module looks the same and lives anywhere Python can import it from.
"""
