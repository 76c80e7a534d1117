"""From a model to units: first values, names, tiling, and which modules are wrapped."""
