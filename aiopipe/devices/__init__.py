"""Concrete devices and their backends."""
