"""Advice on servers: policies and their chunks within an objective, and their flags."""
