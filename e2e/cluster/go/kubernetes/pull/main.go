// Makes containerd hold the named images and no others, through its CRI plugin, as the kubelet would: layers that are
// unpacked already are not fetched again, and every name of a removed image goes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"
)

func main() {
	socket := flag.String("socket", "", "address of containerd, unix://...")
	keep := flag.String("keep", "", "an image that stays and is not pulled")
	flag.Parse()
	if err := hold(context.Background(), *socket, *keep, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func hold(ctx context.Context, socket, keep string, references []string) error {
	images, err := cri.NewRemoteImageService(socket, 10*time.Minute, nil, nil)
	if err != nil {
		return err
	}
	for _, reference := range references {
		started := time.Now()
		if _, err := images.PullImage(ctx, &runtimeapi.ImageSpec{Image: reference}, nil, nil); err != nil {
			return err
		}
		fmt.Printf("%s\t%.1f\n", reference, time.Since(started).Seconds())
	}
	present, err := images.ListImages(ctx, nil)
	if err != nil {
		return err
	}
	for _, image := range present {
		wanted := func(tag string) bool { return tag == keep || slices.Contains(references, tag) }
		if slices.ContainsFunc(image.RepoTags, wanted) {
			continue
		}
		if err := images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: image.Id}); err != nil {
			return err
		}
	}
	return nil
}
