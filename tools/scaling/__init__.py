"""Scaling laws of loops: plan, collect, fit, predict and plot; the command is tools/scaling_law.py."""
