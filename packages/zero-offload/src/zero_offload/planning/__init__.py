"""Plans, before anything exists: facts of the hardware, bytes, seconds, and the choice of a placement."""
