"""What a recurrent state does from loop to loop, and what a readout sees of it: pure functions, and measurements.

Imports nothing above the model. docs/readout_blind_spot.md has the formulas and how to read them.
"""
