// Command tidewal-woodpecker is the sidecar through which Tidewal uses Woodpecker, a library for Go: it owns one log,
// and serves the processes of its machine at a Unix socket. README.md says how it is built, started and licensed.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	stdlog "log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"gopkg.in/yaml.v3"

	"github.com/zilliztech/woodpecker/common/config"
	"github.com/zilliztech/woodpecker/common/etcd"
	storage "github.com/zilliztech/woodpecker/common/objectstorage"
	"github.com/zilliztech/woodpecker/woodpecker"
)

const (
	woodpeckerPrefix = "woodpecker" // the one that the library writes into etcd, whatever meta.prefix says
	garbagePercent   = 400          // of what is in use: an append makes five times its bytes, which nobody needs for long
	memoryLimit      = 1 << 30      // bytes, near which garbage is collected as often as it must be
)

//go:embed woodpecker.yaml
var defaults []byte

type files []string

func (f *files) String() string          { return fmt.Sprint(*f) }
func (f *files) Set(value string) error  { *f = append(*f, value); return nil }
func fatal(format string, values ...any) { stdlog.Fatalf("tidewal-woodpecker: "+format, values...) }

func main() {
	var configs files
	directory := flag.String("directory", "", "the folder of the log on this machine: its socket and its lock")
	flag.Var(&configs, "config", "a file of settings in the format of Woodpecker; a later one wins, key by key")
	flag.Parse()
	if *directory == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	settings, err := loaded(configs)
	if err != nil {
		fatal("%v", err)
	}
	limitGarbage()
	if err := run(*directory, settings); err != nil {
		fatal("%v", err)
	}
}

// limitGarbage trades memory for a third of the processor's time, which the collection of garbage took. Go's own variables
// go before.
func limitGarbage() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbagePercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit)
	}
}

// loaded are the settings: those of `woodpecker.yaml`, which has every key, and over them those of the files. The
// library's own defaults, which differ from its file, are never met.
func loaded(paths []string) (*config.Configuration, error) {
	settings, err := config.NewConfiguration()
	if err != nil {
		return nil, err
	}
	if err := yaml.Unmarshal(defaults, settings); err != nil {
		return nil, err
	}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if err := yaml.Unmarshal(content, settings); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	if settings.Woodpecker.Storage.IsStorageService() {
		return nil, errors.New("woodpecker.storage.type service, a cluster of log stores, is not served: set minio (any S3) or local")
	}
	if prefix := settings.Woodpecker.Meta.Prefix; prefix != woodpeckerPrefix {
		settings.Minio.RootPath += "/" + prefix // the numbers that name a log's segments there are counted in etcd
	}
	return settings, settings.Validate()
}

func run(directory string, settings *config.Configuration) error {
	lock, err := locked(directory)
	if err != nil {
		return err
	}
	defer lock.Close()
	local, err := takeLocal(settings)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	client, meta, err := connected(ctx, settings)
	if err != nil {
		return err
	}
	owner, err := newSidecar(ctx, client, meta, local)
	if err != nil {
		return err
	}
	go owner.retain(ctx)
	listener, err := listening(directory)
	if err != nil {
		return err
	}
	go func() {
		if err := newServer(owner).serve(listener); ctx.Err() == nil {
			fatal("the socket: %v", err)
		}
	}()
	stdlog.Printf("tidewal-woodpecker: ready, incarnation %d", owner.boot)
	<-ctx.Done()
	_ = listener.Close()
	owner.close()
	_ = client.Close(context.Background())
	return woodpecker.StopEmbedLogStore()
}

// locked takes the folder, which it makes where it is not there, for this process.
func locked(directory string) (*os.File, error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(directory, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%s has a sidecar already", directory)
	}
	return lock, nil
}

// listening listens at the socket of the folder, which is this process's by the lock; a relative path keeps its address
// short enough. It appears under its name when it takes connections.
func listening(directory string) (net.Listener, error) {
	if err := os.Chdir(directory); err != nil {
		return nil, err
	}
	_ = os.Remove("socket")
	_ = os.Remove("socket.new")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: "socket.new", Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	if err := os.Chmod("socket.new", 0o600); err != nil {
		return nil, err
	}
	return listener, os.Rename("socket.new", "socket")
}

// connected opens etcd and Woodpecker in this process.
func connected(ctx context.Context, settings *config.Configuration) (woodpecker.Client, *clientv3.Client, error) {
	meta, err := etcdClient(settings)
	if err != nil {
		return nil, nil, err
	}
	asked, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	if _, err := meta.Get(asked, ownerKey); err != nil {
		return nil, nil, fmt.Errorf("etcd at %v: %w", settings.Etcd.GetEndpoints(), err)
	}
	var store storage.ObjectStorage
	if settings.Woodpecker.Storage.IsStorageMinio() {
		if store, err = storage.NewObjectStorage(ctx, settings); err != nil {
			return nil, nil, fmt.Errorf("the object store: %w", err)
		}
	}
	client, err := woodpecker.NewEmbedClient(ctx, settings, meta, store, false)
	return client, meta, err
}

// etcdClient puts all keys below `meta.prefix` where that is not the library's own: many logs can share one etcd.
func etcdClient(settings *config.Configuration) (*clientv3.Client, error) {
	own := settings.Etcd
	plain := clientv3.Config{
		Endpoints: own.GetEndpoints(), DialTimeout: 5 * time.Second,
		Username: map[bool]string{true: own.Auth.UserName}[own.Auth.Enabled],
		Password: map[bool]string{true: own.Auth.Password}[own.Auth.Enabled],
	}
	var meta *clientv3.Client
	var err error
	if own.Ssl.Enabled {
		meta, err = etcd.GetRemoteEtcdSSLClientWithCfg(own.GetEndpoints(), own.Ssl.TlsCert, own.Ssl.TlsKey, own.Ssl.TlsCACert, own.Ssl.TlsMinVersion, plain)
	} else {
		meta, err = clientv3.New(plain)
	}
	if err != nil {
		return nil, err
	}
	if prefix := settings.Woodpecker.Meta.Prefix; prefix != woodpeckerPrefix {
		meta.KV = namespace.NewKV(meta.KV, prefix+"/")
		meta.Watcher = namespace.NewWatcher(meta.Watcher, prefix+"/")
		meta.Lease = namespace.NewLease(meta.Lease, prefix+"/")
	}
	return meta, nil
}
