"""Opens pipelines of diffusers."""
