"""Denoisers as folders of diffusers: what `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` loads."""
