-- Writes the record and new tokens of a session or a request; idempotent.
-- KEYS[1] hash: epoch (the newest that was granted), holder (who claimed it), writer (the epoch of the record),
--         progress (of the record, within its epoch), record; or epoch and ended, of a forgotten session
-- KEYS[2] string: the tokens of the record, four bytes each
-- KEYS[3] and KEYS[4]: ledger of its kind, as in prelude.lua
-- ARGV[1] its name in the ledger, ARGV[2] most entries there, ARGV[3] most bytes
-- ARGV[4] epoch of the caller, ARGV[5] its progress, ARGV[6] the record
-- ARGV[7] bytes of tokens expected to be stored already, ARGV[8] the tokens that follow
-- ARGV[9] milliseconds to keep it
-- returns 1; 0 if the expected tokens are not stored, so that all must be sent; -1 if the epoch is stale; or the
-- entries to evict first, as in prelude.lua
own_entry(KEYS[1], KEYS[2])
local epoch, offset = tonumber(ARGV[4]), tonumber(ARGV[7])
local newest = count(KEYS[1], 'epoch')
if newest > epoch or newest == epoch and redis.call('HEXISTS', KEYS[1], 'ended') == 1 then
    return STALE
end
local is_mine = count(KEYS[1], 'writer') == epoch
if is_mine and count(KEYS[1], 'progress') > tonumber(ARGV[5]) then
    return WRITTEN -- a delayed write, older than the stored one
end
if offset > 0 and not (is_mine and redis.call('STRLEN', KEYS[2]) >= offset) then
    return INCOMPLETE
end
local bytes = OVERHEAD + offset + #ARGV[8] + #ARGV[6]
local full = enter(KEYS[3], KEYS[4], ARGV[1], bytes, ARGV[9], {tonumber(ARGV[2]), tonumber(ARGV[3])})
if full then
    return full
end
if offset == 0 then
    redis.call('SET', KEYS[2], ARGV[8])
else
    redis.call('SETRANGE', KEYS[2], ARGV[7], ARGV[8])
end
if newest < epoch then
    redis.call('HDEL', KEYS[1], 'holder', 'ended') -- the epoch was granted without this index
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[4], 'writer', ARGV[4], 'progress', ARGV[5], 'record', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[9])
redis.call('PEXPIRE', KEYS[2], ARGV[9])
return WRITTEN
