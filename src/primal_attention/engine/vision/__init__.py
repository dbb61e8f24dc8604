"""Images: recipes, batches and augmentation."""
