-- Writes what is known of a session or a request, and its new tokens. The same twice changes nothing.
-- KEYS[1] hash: epoch (the newest that was granted), holder (who claimed it), writer (the epoch of the record),
--         progress (of the record, within its epoch), record
-- KEYS[2] string: the tokens of the record, four bytes each
-- ARGV[1] epoch of the caller, ARGV[2] its progress, ARGV[3] the record
-- ARGV[4] bytes of tokens that should be there already, ARGV[5] those that follow
-- ARGV[6] milliseconds to keep it
-- returns 1, or 0 where the tokens that should be there are not: all are wanted; or -1 where the epoch is over
own(KEYS[1], 'hash')
own(KEYS[2], 'string')
local epoch, offset = tonumber(ARGV[1]), tonumber(ARGV[4])
if count(KEYS[1], 'epoch') > epoch then
    return -1
end
if count(KEYS[1], 'epoch') < epoch then
    redis.call('HDEL', KEYS[1], 'holder') -- an epoch that was granted without this index
end
local is_mine = count(KEYS[1], 'writer') == epoch
if is_mine and count(KEYS[1], 'progress') > tonumber(ARGV[2]) then
    return 1 -- a write that was held up somewhere: a newer one has overtaken it
end
if offset == 0 then
    redis.call('SET', KEYS[2], ARGV[5])
elseif is_mine and redis.call('STRLEN', KEYS[2]) >= offset then
    redis.call('SETRANGE', KEYS[2], ARGV[4], ARGV[5])
else
    return 0
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'writer', ARGV[1], 'progress', ARGV[2], 'record', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return 1
