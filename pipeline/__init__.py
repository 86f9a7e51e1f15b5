"""From nuScenes-format data to a gated INT8 BEV model: the stages and what they are made of."""

from pipeline.telemetry import switch_off

switch_off()
