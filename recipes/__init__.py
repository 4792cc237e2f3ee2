"""Recipes: read, copy, modify. Each is one script and the TorchX component that launches it."""
