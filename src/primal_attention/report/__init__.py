"""Tables and pictures of finished runs. Reads what runs wrote; no model is loaded."""
