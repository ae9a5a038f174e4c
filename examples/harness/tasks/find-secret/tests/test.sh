#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/code.txt)" = 7319 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
