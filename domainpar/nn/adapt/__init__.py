"""Any PyG model on a split graph: every torch call of its forward pass is watched, and made exact or refused."""
