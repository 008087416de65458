"""Real servers and real models: throughput, overload, latency targets, quality."""
