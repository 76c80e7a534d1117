"""Measures and checks a folder for the command line."""
