-- Notes that a worker holds prefixes of a text, each of one block more, for as long as its lease runs.
-- KEYS[1] sorted set of leases, as in register.lua
-- KEYS[2] sorted set: eight bytes that name a prefix, scored by the millisecond at which it was noted, less a little for
--         every block: it is older than all before it in its text, on which it stands
-- ARGV[1] worker, ARGV[2] the names, one after another, ARGV[3] most names to keep: the oldest go,
-- ARGV[4] longest lease in milliseconds, ARGV[5] name of the prefix before the first of these; empty for none
-- returns 1; or 0 where the prefix before them is not known: all are wanted; or -1 for a worker without a lease
local STEP = 2 ^ -12 -- of a millisecond: the least difference at this size of numbers
own(KEYS[1], 'zset')
own(KEYS[2], 'zset')
local now = now_ms()
local ends = math.min(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 0, now + ARGV[4])
if ends <= now then
    return STALE
end
local score = ARGV[5] == '' and now or redis.call('ZSCORE', KEYS[2], ARGV[5])
if not score then
    return INCOMPLETE
end
score = math.min(tonumber(score), now)
for first = 1, #ARGV[2], 8 do
    score = score - STEP
    redis.call('ZADD', KEYS[2], string.format('%.17g', score), string.sub(ARGV[2], first, first + 7))
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
redis.call('PEXPIREAT', KEYS[2], as_text(ends))
return WRITTEN
