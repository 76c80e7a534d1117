"""Models of other people's packages, trained sharded and on plain torch: `nox -s zoo`."""
