-- Removes a worker and its entries at once.
-- KEYS[1..3] as in register.lua
-- ARGV[1] worker
-- returns 1
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[3])
return 1
