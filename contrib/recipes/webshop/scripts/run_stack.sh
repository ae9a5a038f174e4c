#!/usr/bin/env bash
# Run the recipe on this machine, each part in its own process: store, shop, algorithm (training) and runners.
#   scripts/run_stack.sh [options of agl/train.py, for example --steps 9 --out trained]
# Settings are environment variables:
#   RUNNERS=2                            number of runner processes, each with eight concurrent rollouts
#   STACK_FOLDER=runs/webshop            folder for a log of each part and the file of the store
#   STACK_STORE=mongodb://host/database  another place for the store's data, in the form of `agl store --db`
#   AGL_SERVER_HOST, AGL_SERVER_PORT     host and port of the store, by default 127.0.0.1 and 4747
#   GATEWAY_PORT=8000, SHOP_PORT=8080    ports of the model and the shop, on the same host
#   AGL_TOKEN                            token beyond 127.0.0.1; if unset, one is written to STACK_FOLDER/token
#   AGENT_LIGHTNING_OTLP_ENDPOINT, AGL_EMITTER_DEBUG  the same as for other programs
# All parts end when the training ends, at Ctrl+C (immediately at the second one), or when a part ends too early.
# Exit codes: 0 trained, 2 something is missing, 3 the store ended, 4 the shop ended, 5 the algorithm ended, 6 a runner
# ended, 130 Ctrl+C, 143 SIGTERM, 137 a second Ctrl+C or SIGTERM.
set -euo pipefail
set -m # each part has its own process group: Ctrl+C reaches only this script, which ends the parts in order
umask 077

refuse() {
  echo "run_stack.sh: $*" >&2
  exit 2
}

needs() { # needs COMMAND ADVICE
  command -v "$1" >/dev/null || refuse "there is no $1 on the PATH: $2"
}

((BASH_VERSINFO[0] >= 4)) || refuse "bash 4 or newer is needed; this is $BASH_VERSION"
recipe=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
host=${AGL_SERVER_HOST:-127.0.0.1}
runners=${RUNNERS:-2}
declare -A ports=(
  [AGL_SERVER_PORT]=${AGL_SERVER_PORT:-4747} [GATEWAY_PORT]=${GATEWAY_PORT:-8000} [SHOP_PORT]=${SHOP_PORT:-8080}
)
here=$host # the address for clients on this machine
[[ $host == 0.0.0.0 ]] && here=127.0.0.1

needs agl "install agl-framework with its extra demo, and activate its environment"
needs python "activate the environment of agl-framework"
needs node "install Node 20 or newer; the agent is a Node program"
[[ $runners =~ ^[1-9][0-9]*$ ]] || refuse "RUNNERS must be a number of processes, at least 1; it is '$runners'"
for name in "${!ports[@]}"; do
  port=${ports[$name]}
  [[ $port =~ ^[1-9][0-9]{0,4}$ ]] || refuse "$name must be a port, 1 to 65535; it is '$port'"
  if (exec 4<>"/dev/tcp/$here/$port") 2>/dev/null; then
    refuse "port $port of $here is in use: set $name to a free port"
  fi
done
if [[ ! -e $recipe/dist/agent.cjs ]]; then
  needs npm "install npm 9 or newer; it is needed to build the agent"
  (cd "$recipe" && npm ci --ignore-scripts && npm run build)
fi

folder=${STACK_FOLDER:-runs/webshop}
mkdir -p "$folder"
scratch=$(mktemp -d)
if [[ $host != 127.0.0.1 && -z ${AGL_TOKEN:-}${AGL_TOKEN_FILE:-} ]]; then
  AGL_TOKEN=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
  echo "$AGL_TOKEN" >"$folder/token"
  export AGL_TOKEN
fi
export AGL_MANAGED_STORE=0
export AGENT_LIGHTNING_STORE_URL="http://$here:${ports[AGL_SERVER_PORT]}"
export AGL_SERVER_HOST=$host
export AGL_SERVER_PORT=${ports[AGL_SERVER_PORT]}
export AGL_RUN_ID=${AGL_RUN_ID:-webshop-$(date +%Y%m%d-%H%M%S)-$$}
export SHOP_URL="http://$here:${ports[SHOP_PORT]}"
export PYTHONUNBUFFERED=1

# --- parts -----------------------------------------------------------------------------------------------------------

declare -A groups=() # process groups of the running parts
declare -A ready=()
logs=() # processes that write the logs
mkfifo "$scratch/events"
exec 3<>"$scratch/events" # "ready NAME" and "ended NAME CODE", one per line

start() { # start NAME COMMAND...
  mkfifo "$scratch/$1"
  follow "$1" <"$scratch/$1" &
  logs+=("$!")
  (
    trap : INT TERM # the command in the same group handles them
    code=0
    "${@:2}" >"$scratch/$1" 2>&1 </dev/null 3>&- || code=$?
    echo "ended $1 $code" >&3
  ) 2>/dev/null & # hides a message of bash; this script reports the end of a command below
  groups[$1]=$!
}

follow() { # follow NAME: write the output of a part to its log; detect ready runners, and show the training
  local line
  while IFS= read -r line || [[ -n $line ]]; do
    printf '%s\n' "$line"
    [[ $1 != algorithm ]] || printf '%s\n' "$line" >&4
    [[ $line != *"serves the queue as"* ]] || echo "ready $1" >&3
  done 4>&1 >"$folder/$1.log"
}

healthy() ( # healthy PORT: true if /health responds with 200
  exec 5<>"/dev/tcp/$here/$1" || exit 1
  printf 'GET /health HTTP/1.0\r\nHost: %s:%s\r\n\r\n' "$here" "$1" >&5
  read -r -t 5 line <&5 && [[ $line == *" 200 "* ]]
) 2>/dev/null

await() { # await NAME [PORT]: wait until the part responds on the port, or reports that it is ready
  until [[ -n ${ready[$1]:-} ]]; do
    if [[ -n ${2:-} ]] && healthy "$2"; then
      ready[$1]=1
    else
      event ${2:+0.2}
    fi
  done
  echo "$1 is ready"
}

event() { # event [SECONDS]: wait for an event, at most this long; if a part ends early, end all
  local what name code
  read -r ${1:+-t "$1"} what name code <&3 || return 0
  if [[ $what == ready ]]; then
    ready[$name]=1
    return
  fi
  wait "${groups[$name]}" || true
  kill -KILL -- "-${groups[$name]}" 2>/dev/null || true # its remaining processes
  unset "groups[$name]"
  [[ -z $ending ]] || return 0
  case $name:$code in
    algorithm:0 | runner-*:0) ;; # expected at the end of a run
    *) fail "$name" "$code" ;;
  esac
}

fail() { # fail NAME CODE
  local how="ended with exit code $2"
  (($2 <= 128)) || how="was ended by SIG$(kill -l "$2")"
  echo "run_stack.sh: $1 $how; the end of $folder/$1.log:" >&2
  tail -n 20 "$folder/$1.log" >&2
  case $1 in
    store) exit 3 ;;
    shop) exit 4 ;;
    algorithm) exit 5 ;;
    *) exit 6 ;;
  esac
}

# shellcheck disable=SC2317,SC2329 # reached by the trap
stop() { # stop SIGNAL PATTERN: end the parts of this name, and wait for their end
  local name
  for name in "${!groups[@]}"; do
    # shellcheck disable=SC2053 # a pattern
    [[ $name != $2 ]] || kill "-$1" -- "-${groups[$name]}" 2>/dev/null || true
  done
  for name in "${!groups[@]}"; do
    # shellcheck disable=SC2053
    while [[ $name == $2 && -n ${groups[$name]:-} ]]; do
      event
    done
  done
}

ending=
# shellcheck disable=SC2317,SC2329 # reached by the trap
finish() {
  local code=$?
  ending=yes
  trap kill_all INT TERM HUP
  stop INT "[ar]*" # algorithm and runners
  stop TERM "s*"   # shop and store
  wait "${logs[@]}" || true
  rm -rf "$scratch"
  exit "$code"
}

# shellcheck disable=SC2317,SC2329 # reached by the trap
kill_all() {
  local name
  for name in "${!groups[@]}"; do
    kill -KILL -- "-${groups[$name]}" 2>/dev/null || true
  done
  rm -rf "$scratch"
  exit 137
}

# --- the stack -------------------------------------------------------------------------------------------------------

trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

start store agl store --host "$host" --port "$AGL_SERVER_PORT" --db "${STACK_STORE:-$folder/store.db}"
await store "$AGL_SERVER_PORT"
start shop python "$recipe/agl/shop.py" --host "$host" --port "${ports[SHOP_PORT]}"
await shop "${ports[SHOP_PORT]}"
start algorithm env AGL_CURRENT_ROLE=algorithm python "$recipe/agl/train.py" \
  --external-store-address "$AGENT_LIGHTNING_STORE_URL" \
  --gateway-host "$host" --gateway-port "${ports[GATEWAY_PORT]}" "$@"
for ((number = 1; number <= runners; number++)); do
  start "runner-$number" env AGL_CURRENT_ROLE=runner python "$recipe/agl/run_rollouts.py" \
    --external-store-address "$AGENT_LIGHTNING_STORE_URL"
done
for ((number = 1; number <= runners; number++)); do
  await "runner-$number"
done
await algorithm "${ports[GATEWAY_PORT]}"
cat <<END
run        $AGL_RUN_ID
store      $AGENT_LIGHTNING_STORE_URL (also the dashboard)
model      http://$here:${ports[GATEWAY_PORT]}/v1
shop       $SHOP_URL
logs       $folder
END
while [[ -n ${groups[algorithm]:-} ]]; do
  event
done
for ((number = 1; number <= runners; number++)); do
  while [[ -n ${groups[runner-$number]:-} ]]; do
    event
  done
done
