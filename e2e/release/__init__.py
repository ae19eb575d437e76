"""Makes a release: images and chart in a registry, a changelog, a list of what is in the images.

make release REGISTRY=registry.example.com/team VERSION=0.2.0
"""
