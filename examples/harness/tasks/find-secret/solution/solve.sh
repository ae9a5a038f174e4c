#!/bin/bash
cd /app && grep -rh '^code: ' notes | cut -d ' ' -f 2 > code.txt
