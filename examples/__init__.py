"""Scripts to start from. README.md lists them, and tests run every one."""
