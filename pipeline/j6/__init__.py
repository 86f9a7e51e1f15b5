"""Hardware model of the Horizon Journey 6 family: ONNX graph -> execution plan -> simulated latency, bandwidth and memory.

Depends on onnx and numpy alone (PyYAML reads the chip files). The order of the passes: `graph` (import), `fuse`, `assign`, `tile`, `cost`,
`schedule`, `memory`, joined in `plan`; `profile`, `report` and `trace` read a plan; `fit` and `validate` compare with measured latencies.
"""
