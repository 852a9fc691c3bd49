ByJnz
Àlçþ?©f”¿