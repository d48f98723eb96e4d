package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	channelsPrefix = "tidewal/channels/"
	ownerKey       = "tidewal/owner"
	etcdTimeout    = 10 * time.Second
)

// policy is the wire form of a channel's policy (runtime/log/policy_codec.py).
type policy struct {
	Ephemeral       bool     `msgpack:"ephemeral" json:"ephemeral"`
	Acks            string   `msgpack:"acks" json:"acks"`
	RetentionS      *float64 `msgpack:"retention_s" json:"retention_s"`
	RetentionBytes  *int64   `msgpack:"retention_bytes" json:"retention_bytes"`
	MaxMessageBytes int64    `msgpack:"max_message_bytes" json:"max_message_bytes"`
	EphemeralBytes  int64    `msgpack:"ephemeral_bytes" json:"ephemeral_bytes"`
	Delivery        string   `msgpack:"delivery" json:"delivery"`
	Temporary       bool     `msgpack:"temporary,omitempty" json:"temporary,omitempty"`
}

func (p policy) equals(other policy) bool {
	one, _ := json.Marshal(p)
	two, _ := json.Marshal(other)
	return string(one) == string(two)
}

// channelRecord is what etcd holds of a channel, beside what Woodpecker has of its log. One of a dropped channel stays:
// its `Base` is where the ids of the next channel of that name begin.
type channelRecord struct {
	Policy  policy            `json:"policy"`
	Log     string            `json:"log"`     // of Woodpecker; empty for an ephemeral channel
	Number  uint64            `json:"number"`  // how many channels of this name there have been
	Base    uint64            `json:"base"`    // added to the numbers of segments in ids
	Removed uint64            `json:"removed"` // the last id that was removed
	Holds   map[string]uint64 `json:"holds"`
	Dropped bool              `json:"dropped"`
}

// lowestHold is the lowest id that is held, the largest number where none is.
func (r *channelRecord) lowestHold() uint64 {
	lowest := uint64(math.MaxUint64)
	for _, id := range r.Holds {
		lowest = min(lowest, id)
	}
	return lowest
}

// registry keeps the records of channels in etcd. Each change is conditional on what it was made from, and on this
// sidecar's being the owner of the log still.
type registry struct {
	etcd *clientv3.Client
	boot uint64 // the incarnation of this sidecar
}

// errOther says that a record is another one than the change was made from.
var errOther = errors.New("the record of the channel is another one meanwhile")

type stored struct {
	channelRecord
	revision int64
}

func (r registry) get(ctx context.Context, name string) (*stored, error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	answer, err := r.etcd.Get(ctx, channelsPrefix+name)
	if err != nil || len(answer.Kvs) == 0 {
		return nil, err
	}
	return decodeStored(answer.Kvs[0].Value, answer.Kvs[0].ModRevision)
}

func decodeStored(value []byte, revision int64) (*stored, error) {
	found := &stored{revision: revision}
	if err := json.Unmarshal(value, &found.channelRecord); err != nil {
		return nil, corrupt("the record of a channel in etcd: %v", err)
	}
	return found, nil
}

// all are the channels that there are, by name.
func (r registry) all(ctx context.Context) (map[string]*stored, error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	answer, err := r.etcd.Get(ctx, channelsPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	found := map[string]*stored{}
	for _, each := range answer.Kvs {
		record, err := decodeStored(each.Value, each.ModRevision)
		if err != nil {
			return nil, err
		}
		if !record.Dropped {
			found[strings.TrimPrefix(string(each.Key), channelsPrefix)] = record
		}
	}
	return found, nil
}

// put stores `next` where the record is still the one of that revision (0: where there is none). Otherwise it fails with
// errOther, or with `Fenced` where another sidecar has the log.
func (r registry) put(ctx context.Context, name string, next channelRecord, revision int64) (*stored, error) {
	value, err := json.Marshal(next)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	key := channelsPrefix + name
	own := clientv3.Compare(clientv3.Value(ownerKey), "=", fmt.Sprint(r.boot))
	answer, err := r.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision), own).
		Then(clientv3.OpPut(key, string(value))).Else(clientv3.OpTxn([]clientv3.Cmp{own}, nil, nil)).Commit()
	switch {
	case err != nil:
		return nil, err
	case answer.Succeeded:
		return &stored{next, answer.Header.Revision}, nil
	case answer.Responses[0].GetResponseTxn().Succeeded:
		return nil, errOther
	}
	return nil, fenced(name)
}

// alter stores the record of a channel as `change` makes it of the one that is known. Where a change before this one is
// stored although its answer was lost, it makes it of that.
func (r registry) alter(ctx context.Context, name string, known *stored, change func(*channelRecord)) (*stored, error) {
	for {
		next := known.channelRecord
		change(&next)
		changed, err := r.put(ctx, name, next, known.revision)
		if !errors.Is(err, errOther) {
			return changed, err
		}
		if known, err = r.get(ctx, name); err != nil {
			return nil, err
		}
		if known == nil || known.Dropped {
			return nil, notFound(name)
		}
	}
}

// takeOver makes this sidecar the owner of the log: the newest one is. Returns its incarnation, and a channel that is
// closed once another sidecar has taken over.
func (r registry) takeOver(ctx context.Context) (uint64, <-chan struct{}, error) {
	for {
		answer, err := r.etcd.Get(ctx, ownerKey)
		if err != nil {
			return 0, nil, err
		}
		boot, revision := uint64(1), int64(0)
		if len(answer.Kvs) > 0 {
			if _, err := fmt.Sscan(string(answer.Kvs[0].Value), &boot); err != nil {
				return 0, nil, corrupt("the owner in etcd: %v", err)
			}
			boot, revision = boot+1, answer.Kvs[0].ModRevision
		}
		taken, err := r.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(ownerKey), "=", revision)).
			Then(clientv3.OpPut(ownerKey, fmt.Sprint(boot))).Commit()
		if err != nil {
			return 0, nil, err
		}
		if taken.Succeeded {
			return boot, r.superseded(ctx, taken.Header.Revision), nil
		}
	}
}

// owner is the incarnation of the sidecar that has the log.
func (r registry) owner(ctx context.Context) (boot uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	answer, err := r.etcd.Get(ctx, ownerKey)
	if err == nil && len(answer.Kvs) > 0 {
		_, err = fmt.Sscan(string(answer.Kvs[0].Value), &boot)
	}
	return boot, err
}

func (r registry) superseded(ctx context.Context, revision int64) <-chan struct{} {
	over := make(chan struct{})
	changes := r.etcd.Watch(ctx, ownerKey, clientv3.WithRev(revision+1))
	go func() {
		for change := range changes {
			if len(change.Events) > 0 {
				close(over)
				return
			}
		}
	}()
	return over
}
