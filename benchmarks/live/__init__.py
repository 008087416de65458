"""Real servers and models: throughput, overload, SLO targets, quality."""
