"""Files of the official U-ViT, SiT, DiT and MAE, and of timm: how they are recognised, read and written."""

__all__: list[str] = []  # by `checkpoint.import_official` and `checkpoint.export_file`
