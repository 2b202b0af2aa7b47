"""Cases, inputs and comparisons for tests and benchmarks."""
