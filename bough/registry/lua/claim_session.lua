-- Claims a session: grants an epoch greater than all before it, by the server's clock.
-- KEYS[1..4] as in record.lua
-- ARGV[1] its name in the ledger, ARGV[2] most entries there, ARGV[3] most bytes
-- ARGV[4] claimant, unique for each claim, ARGV[5] milliseconds to keep it with a record, ARGV[6] without one
-- ARGV[7] the claimant's last epoch, which must still be the newest; empty claims unconditionally
-- ARGV[8] an epoch that the new one must exceed, granted without this index; 0 for none
-- returns the epoch in decimal, the record and the tokens (false if missing); -1 if another has claimed it since; or
-- the entries to evict first, as in prelude.lua
own_entry(KEYS[1], KEYS[2])
local newest = count(KEYS[1], 'epoch')
local record = redis.call('HGET', KEYS[1], 'record')
local is_repeated = redis.call('HGET', KEYS[1], 'holder') == ARGV[4] -- a retry after a lost reply
if not is_repeated and ARGV[7] ~= '' and newest > tonumber(ARGV[7]) then
    return STALE
end
local keep = record and ARGV[5] or ARGV[6]
local bytes = OVERHEAD + redis.call('STRLEN', KEYS[2]) + (record and #record or 0)
local full = enter(KEYS[3], KEYS[4], ARGV[1], bytes, keep, {tonumber(ARGV[2]), tonumber(ARGV[3])})
if full then
    return full
end
if not is_repeated then
    newest = math.max(newest + 1, now_us(), tonumber(ARGV[8]) + 1)
    redis.call('HDEL', KEYS[1], 'ended')
    redis.call('HSET', KEYS[1], 'epoch', as_text(newest), 'holder', ARGV[4])
end
redis.call('PEXPIRE', KEYS[1], keep)
redis.call('PEXPIRE', KEYS[2], keep)
return {as_text(newest), record, redis.call('GET', KEYS[2])}
