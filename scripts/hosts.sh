#!/usr/bin/env bash
# Runs mpirun between hosts that it makes from this machine while it runs: network namespaces, each with a host name and shared
# memory of its own, whose wires have a bandwidth and a delay.
#   scripts/hosts.sh [--hosts 2] [--ranks 1] [--rate 1gbit] [--delay 0ms] PROGRAM [ARGUMENT...]
#   scripts/hosts.sh [--hosts 2] [--rate 1gbit] [--delay 0ms] --on FILE
# --ranks counts the ranks of each host, --rate is a host's maximum send rate (tc's tbf), and --delay is that of each packet, in one
# direction, in ms (scripts/delay_bridge.py). $MPIRUN_FLAGS are further words for mpirun. It needs root, iproute2 and Open MPI. --on
# starts nothing: it makes the program FILE, where `FILE 10.99.0.2 COMMAND...` runs a command on the second host, prints "ready",
# and keeps the hosts until its standard input ends.
set -euo pipefail
hosts=2 ranks=1 rate=1gbit delay=0ms on=
while [[ "${1:-}" == --* ]]; do
  case $1 in
    --hosts) hosts=$2 ;;
    --ranks) ranks=$2 ;;
    --rate) rate=$2 ;;
    --delay) delay=$2 ;;
    --on) on=$2 ;;
    *) echo "hosts: '$1' is not --hosts, --ranks, --rate, --delay or --on" >&2; exit 2 ;;
  esac
  shift 2
done
[[ -n $on ]] || (($#)) || { echo "hosts: name the program that mpirun is to start" >&2; exit 2; }
(($(id -u) == 0)) || { echo "hosts: network namespaces need root" >&2; exit 1; }
tools=(ip tc unshare)
[[ -n $on ]] || tools+=(mpirun)
for tool in "${tools[@]}"; do
  command -v "$tool" > /dev/null || { echo "hosts: $tool is missing (Debian: iproute2, util-linux, openmpi-bin)" >&2; exit 1; }
done

name=sluice$$
work=$(mktemp -d "${TMPDIR:-/tmp}/hosts.XXXXXX")
clean_up() {
  for ((i = 0; i <= hosts; ++i)); do ip netns del "$name-$i" 2> /dev/null || true; done
  rm -rf "$work"
}
trap clean_up EXIT

for ((i = 0; i <= hosts; ++i)); do ip netns add "$name-$i"; done
if [[ $delay == 0ms ]]; then  # namespace 0 is the switch
  ip -n "$name-0" link add switch type bridge
  ip -n "$name-0" link set switch up
  for ((i = 1; i <= hosts; ++i)); do
    ip link add wire netns "$name-$i" type veth peer name "port$i" netns "$name-0"
    ip -n "$name-0" link set "port$i" master switch up
  done
else
  [[ $delay =~ ^[0-9]+(\.[0-9]+)?ms$ ]] || { echo "hosts: --delay $delay is not a number of milliseconds, as in 1ms" >&2; exit 2; }
  names=()
  for ((i = 1; i <= hosts; ++i)); do names+=("$name-$i"); done
  coproc bridge { exec "$(dirname "$0")/delay_bridge.py" "${delay%ms}e-3" "${names[@]}"; }
  read -r _ <&"${bridge[0]}" || exit 1  # it has printed why it makes no wires
fi
list=
for ((i = 1; i <= hosts; ++i)); do
  ip -n "$name-$i" addr add "10.99.0.$i/24" dev wire
  ip -n "$name-$i" link set lo up
  [[ $delay == 0ms ]] || ip -n "$name-$i" link set wire mtu 60000  # the bridge forwards few large packets rather than many small ones
  ip -n "$name-$i" link set wire up
  tc -n "$name-$i" qdisc add dev wire root tbf rate "$rate" burst 256kb latency 50ms
  list+=${list:+,}10.99.0.$i:$ranks
done

# mpirun starts its daemon on another host as with ssh: HOST COMMAND... Ranks that open each other's memory by process ids, as those of
# torchrun do, would share memory if process ids were the same on all hosts.
apart=(--mount --uts)
[[ -z $on ]] || apart+=(--pid --fork --kill-child --mount-proc)
cat > "$work/on" << END
#!/usr/bin/env bash
number=\${1##*.}
shift
exec ip netns exec "$name-\$number" unshare ${apart[*]} sh -c "hostname host\$number; mount -t tmpfs tmpfs /dev/shm; \$*"
END
chmod +x "$work/on"
if [[ -n $on ]]; then
  cp "$work/on" "$on"
  echo ready
  cat > /dev/null
  exit
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
printf -v words '%q ' mpirun --oversubscribe --bind-to none --mca plm_rsh_agent "$work/on" --host "$list" \
  --map-by ppr:"$ranks":node ${MPIRUN_FLAGS:-} "$@"
"$work/on" 10.99.0.1 "exec $words"
