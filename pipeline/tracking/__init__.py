"""MLflow: what was measured and what is released. Reads the files the stages wrote; no stage knows it exists."""
