"""The looped model for Hugging Face transformers: files that travel with an exported model and import nothing of ours.

tools/convert_to_hf.py copies them beside the weights, where `trust_remote_code=True` reads them.
"""
