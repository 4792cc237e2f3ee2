"""One question a file: python -m benchmarks.NAME [--quick] [--json FILE]."""
