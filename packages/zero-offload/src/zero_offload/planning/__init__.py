"""Plans a run before anything is allocated: facts of the hardware, bytes, seconds, and the choice of a placement."""
