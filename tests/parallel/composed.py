

def on_four():
    yield from ()
