#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/count.txt)" = 16 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
