"""A differential fuzzer: random programs on plain torch and sharded, which must agree; see README.md."""
