"""LoRA adapters of PEFT.

adapter.py   opens an adapter and reads what it changes
merging.py   presents a checkpoint with adapters merged into it
"""
