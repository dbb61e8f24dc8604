"""Tables and pictures of finished runs. This room reads what runs wrote; it never touches a live model."""
