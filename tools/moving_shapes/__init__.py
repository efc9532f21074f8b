"""How `moving-shapes`, the model that comes with the product, is trained and measured."""
