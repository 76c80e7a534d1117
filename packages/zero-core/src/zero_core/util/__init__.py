"""Holds helpers without knowledge of models: threads at exit, the heap, bytes without pickle."""
