"""Runs `python -m zero_train`, which is the same as the console script `zero-train`."""

from zero_train.app import console

if __name__ == "__main__":
    console()
