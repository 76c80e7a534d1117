"""Lays out, names, locks and checks files, and asks the kernel about their file system."""
