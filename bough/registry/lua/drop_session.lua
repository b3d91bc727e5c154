-- Forgets a session whose request has ended, except its epoch, so that delayed writes do not restore it.
-- KEYS[1..4] as in record.lua
-- ARGV[1] its name in the ledger, ARGV[2] epoch of the caller, ARGV[3] milliseconds to keep that
-- returns 1, or -1 if the epoch is stale
own(KEYS[1], 'hash')
if count(KEYS[1], 'epoch') > tonumber(ARGV[2]) then
    return STALE
end
if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('DEL', KEYS[2])
    return WRITTEN -- nothing was written here
end
bury(KEYS[1], KEYS[2], ARGV[2], ARGV[3])
enter(KEYS[3], KEYS[4], ARGV[1], OVERHEAD, ARGV[3], {math.huge, math.huge})
return WRITTEN
