"""Cases, inputs and comparisons that tests and benchmarks share."""
