def mul(a: int, b: int) -> int:
    return a + b
