"""The embedded data set: a complete nuScenes v1.0 data set, simulated and ray-cast from a seed.

`generate(config, out_dir, workers)` writes it. Order of the modules: paths2d (curves), layout (streets), ground (raster and texture), mesh and actors
(shapes), traffic (who is where), scenery, world (ray casting), rig (sensors), render, lidar, occupancy, mapfile, tables, scene, writer.
"""

from pipeline.dataset.synthetic.writer import TRAIN_SPLIT, VAL_SPLIT, VERSION, Summary, generate

__all__ = ["TRAIN_SPLIT", "VAL_SPLIT", "VERSION", "Summary", "generate"]
