-- Records that a worker has cached prefixes of a text, each longer by one block, while its lease is valid.
-- KEYS[1] sorted set of leases, as in register.lua
-- KEYS[2] sorted set: names of prefixes (eight bytes), scored by the millisecond at which they were recorded, less a
--         little for each block, so that a longer prefix is older than the shorter ones it depends on
-- ARGV[1] worker, ARGV[2] the concatenated names, ARGV[3] most names to keep; the oldest are dropped,
-- ARGV[4] longest lease in milliseconds, ARGV[5] name of the prefix before the first of these; empty for none
-- returns 1; 0 if the prefix before them is unknown, so that all must be sent; -1 for a worker without a lease
local STEP = 2 ^ -12 -- milliseconds, the resolution of doubles at this magnitude
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
